"""What engines share: how single steps and functions are enclosed, and the arithmetic of ellipsoids and norms."""
