"""What a model's small files tell before anything is loaded: context, tokens, pairs that fit."""
