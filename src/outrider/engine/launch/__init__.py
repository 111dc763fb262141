"""Starting processes of this host, and starting them again."""
