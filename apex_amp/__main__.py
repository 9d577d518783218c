"""`python -m apex_amp` is the `apex-amp` command."""
from .cli import main

if __name__ == "__main__":
    main()
