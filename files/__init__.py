"""Files that several programs share: replaced in one move, locked, or appended to line by line."""
