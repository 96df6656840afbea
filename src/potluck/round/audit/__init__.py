"""The audit of a round before its commit: who lied is found, named and left out.

auditcore.py      which chunks to look at, which members to ask, who is found out (pure)
auditor.py        asks the witnesses, recomputes, brings the verdict      witness.py: a member that answers
testimony.py      the messages of an audit                                disputes.py: different averages
exclusions.py     who takes part in nothing, and until when
merkle.py, seals.py   what binds members to what they sent and hold
"""
