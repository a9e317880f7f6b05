"""The package's version, and the torch that it was built against; written by the build."""

version: str
torch_version: str
