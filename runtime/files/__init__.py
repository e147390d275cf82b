"""Files that several programs share: replaced by one rename, locked, or appended to line by line."""
