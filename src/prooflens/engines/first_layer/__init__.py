"""The steps from the input to the first scores: quadratic, or with one norm; used by `layer0` and `exact`."""
