"""The bytes of checkpoints: hashes, parts on storage and their manifests, what is kept, and transfers between nodes."""
