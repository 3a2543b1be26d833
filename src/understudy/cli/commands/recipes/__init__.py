"""Commands about a recipe; none of them imports torch."""
