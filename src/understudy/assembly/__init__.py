"""From a checked recipe to running parts: models, engines, teachers, ranks, critic, data plane."""
