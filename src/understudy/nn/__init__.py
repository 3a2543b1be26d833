"""Model arithmetic that engines, teachers and the policy share."""
