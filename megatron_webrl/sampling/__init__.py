"""Task sampling: how often each environment is drawn, and how every role knows which one a ticket draws."""
