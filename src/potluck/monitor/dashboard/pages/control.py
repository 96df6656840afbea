"""Steering the run: pause, resume, what may change, roll back. For organisers only; all asks first and is logged."""
