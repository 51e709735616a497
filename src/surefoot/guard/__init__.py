"""`surefoot.attach`: hooks that guard one model and its optimizers. Start reading at attach.py."""
