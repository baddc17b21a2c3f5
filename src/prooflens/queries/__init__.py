"""What is asked of attention: functionals and claims, and the simplex programs over weight boxes."""
