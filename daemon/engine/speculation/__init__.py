"""Speculation: tokens that are guessed, and verified in one forward pass for all rows of a batch.

`lookup` guesses what followed when the same tokens stood before; `depth` says how many guesses pay; `verify`
accepts those that plain decode would have drawn.
"""
