"""What layers are made of besides folders and tars: commits of git, Python packages; and which files are left out."""
