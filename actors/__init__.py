"""The services around the bytes, one actor each, and the runtimes they live on. Nothing runs here yet."""
