"""Small worlds with a right answer, made up on the fly."""
