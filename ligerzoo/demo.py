"""placeholder"""

HELD_OUT = ("configparser.py", "difflib.py", "fractions.py", "ipaddress.py", "statistics.py")
