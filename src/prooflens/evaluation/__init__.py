"""How good is prooflens itself: soundness runs, the paper's studies, engines side by side."""
