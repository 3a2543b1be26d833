"""The journal on disk: schema, writer, spilled columns, rewinding."""
