"""The error tree, split by what the caller can do about it.

    PotluckError
    ├── ConfigurationError          your input is wrong: fix it and start again (exit code 2)
    │   ├── LinkFormatError         a join link that cannot be read
    │   ├── CertificateError        the hub's certificate is not the one the link names
    │   └── RoleRefusedError        a role that the link does not allow; names those that it does
    ├── AccessError                 the hub knows you and says no
    │   ├── NotAdmittedError        no valid invite, token or approval
    │   ├── BannedError             banned by an organiser
    │   ├── SeatsTakenError         this person already runs as many peers as allowed
    │   └── PermissionDeniedError   a subject this member may not use
    ├── RetryableError              may succeed later: wait and try again
    │   ├── HubUnavailableError     the hub cannot be reached, or went away
    │   │   └── NobodyAnswersError  the hub is there, but its service does not answer: a store without a leader
    │   ├── DeadlineExceededError   an answer did not come in time
    │   ├── RevisionConflictError   somebody else changed the record first
    │   ├── RoundFailedError        an epoch was not committed in time; names the phase and the peers
    │   ├── StateUnavailableError   no peer that can be believed serves the state that is wanted
    │   ├── BackupError             a backup could not be written or read
    │   └── QueueFullError          a queue, or the buffer in front of it, has no room
    ├── PeerError                   one peer is at fault: go on without it
    │   ├── PeerUnreachableError    no path to it, or it left
    │   ├── NotFiniteError          its values hold NaN or infinity
    │   └── ProtocolError           it sent something that does not decode, or breaks a rule
    ├── StoppedError                this peer was told to leave while it waited for others: leave
    └── FatalError                  stop: going on would lose or corrupt work

A message says what happened, with which value, what follows from it, and what to do.
"""

from __future__ import annotations


class PotluckError(Exception):
    """Base of every error that Potluck raises on purpose."""


class ConfigurationError(PotluckError, ValueError):
    """The caller's input is wrong."""


class LinkFormatError(ConfigurationError):
    """A join link that cannot be read."""


class CertificateError(ConfigurationError):
    """The hub presented a certificate other than the one the join link names."""


class RoleRefusedError(ConfigurationError):
    """The hub lets this member in only as something else."""

    def __init__(self, message: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.allowed = allowed


class AccessError(PotluckError):
    """The hub knows who asks, and says no."""


class NotAdmittedError(AccessError):
    """No valid invite, token or approval."""


class BannedError(AccessError):
    """An organiser has banned this member."""


class SeatsTakenError(AccessError):
    """This person already runs as many peers on this service as the run allows."""


class PermissionDeniedError(AccessError):
    """This member may not use that subject."""


class RetryableError(PotluckError):
    """It may succeed later."""


class HubUnavailableError(RetryableError):
    """The hub cannot be reached, or the connection went away."""


class NobodyAnswersError(HubUnavailableError):
    """The hub can be reached and says that nobody is there to answer: a guard away, a store that has no leader now."""


class DeadlineExceededError(RetryableError, TimeoutError):
    """An answer did not come in time."""


class RevisionConflictError(RetryableError):
    """A compare-and-set failed: the record has another revision than the caller expected."""


class RoundFailedError(RetryableError):
    """An epoch was not committed in time, as far as this peer knows."""


class StateUnavailableError(RetryableError):
    """No peer that can be believed serves the state that is wanted."""


class BackupError(RetryableError):
    """A backup could not be written or read. Training goes on without it."""


class QueueFullError(RetryableError):
    """A queue has as many items or bytes as its owner allows, or the buffer for times without a hub is full."""


class PeerError(PotluckError):
    """One peer is at fault; the others can go on without it."""


class PeerUnreachableError(PeerError):
    """There is no path to the peer, or it has left the run."""


class NotFiniteError(PeerError):
    """Values hold NaN or infinity: they cannot be averaged and are left out."""


class ProtocolError(PeerError):
    """A peer sent something that does not decode, or that breaks a rule of the protocol."""


class StoppedError(PotluckError):
    """This peer was told to leave while it waited for others."""


class FatalError(PotluckError):
    """Going on would lose or corrupt work."""
