"""Fault drills: tools/drill.sh."""
