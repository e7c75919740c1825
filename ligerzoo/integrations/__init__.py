"""ligerzoo in the libraries of others. Each module imports its library, which is optional."""
