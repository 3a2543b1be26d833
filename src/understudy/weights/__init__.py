"""Transport of new weights from the policy to the engines, each set with a version number."""
