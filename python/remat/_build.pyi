"""What this package was built against; written by the build."""

torch_version: str
