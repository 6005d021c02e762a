"""What is done about failures: attempts without progress, causes, and what each restart cost."""
