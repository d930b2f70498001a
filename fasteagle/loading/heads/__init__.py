"""Draft head files of every dialect: `read` and `write` them, `find` and `inspect` them."""
