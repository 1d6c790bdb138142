"""OCI images at the edge of the store: references, manifests, the distribution protocol, and conversion both ways.

The words manifest, index, digest, diff_id and chain_id have their OCI meaning throughout.
"""
