"""HTTP services of this package: process, socket, access."""
