"""The way from the input to the first scores, exactly quadratic or with one norm in it: for `layer0` and `exact`."""
