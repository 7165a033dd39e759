"""The quickstart's job in arms: controls over several seeds, and ablations of single options (docs/learning.md)."""
