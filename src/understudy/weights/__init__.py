"""The stairs from the policy to the engines: new weights go down, a version number comes with them."""
