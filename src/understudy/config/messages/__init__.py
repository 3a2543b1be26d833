"""Error messages for recipes: keys by path, synonyms, explanations."""
