"""``python -m opendata_buffer``."""

from opendata_buffer.cli import main

if __name__ == "__main__":
    main()
