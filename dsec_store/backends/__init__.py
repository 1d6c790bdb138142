"""Where blobs lie: memory, a local folder, S3. Each implements `dsec_store.blobs.BlobStore` and nothing more."""
