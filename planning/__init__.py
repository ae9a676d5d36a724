"""How large a cache has to be, and what ranks would exchange, predicted from a sample of ids."""
