"""An answer for people: words, a page in the terminal, pictures, a web page, two logs compared."""
