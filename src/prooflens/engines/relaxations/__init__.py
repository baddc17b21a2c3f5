"""What engines share: enclosures of single steps and functions, and the arithmetic of ellipsoids and norms."""
