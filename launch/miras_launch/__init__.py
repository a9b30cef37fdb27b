"""Starting runs on several ranks; needs neither torch nor a device."""
