"""Uses of the library that are not part of the core; the product imports none of them."""
