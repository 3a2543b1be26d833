"""Agent loops: one turn, tools, environments; and how a recipe names them."""
