"""What recipes share: running many models, tables, result folders."""
