"""Problems of a recipe in plain words: keys by path, synonyms, explanations."""
