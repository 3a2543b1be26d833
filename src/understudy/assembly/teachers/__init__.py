"""The teachers of a run: started, checked against the student, asked, and given new weights."""
