"""Prompts that several benchmarks share."""

IOI = (
    "When Mary and John went to the store, John gave a drink to",
    "When Tom and Anna went to the park, Anna gave a ball to",
    "When Paul and Sarah went to the house, Paul gave a book to",
    "When Alice and Bob went to the beach, Bob gave a towel to",
    "When James and Emma went to the school, James gave a pen to",
)
"""Fourteen tokens each."""

MOVIE = "the movie was long but very good"
