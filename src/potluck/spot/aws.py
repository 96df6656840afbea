"""Spot machines of AWS EC2, by boto3 (extra `spot`).

All that is made carries the tag `potluck-experiment`, so `down` finds and removes it from any machine, also after the
runner crashed. The join link is a secret: it lies as a SecureString in the Parameter Store, and the machines read it
with the rights of their instance profile. User data has no secret: all processes of a machine can read that, and all
people who may describe instances.
"""

from __future__ import annotations

import logging
import shlex
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from potluck.errors import ConfigurationError, RetryableError
from potluck.spot.provider import Machine, NoCapacityError, ThrottledError
from potluck.spot.tiers import Slot

logger = logging.getLogger(__name__)

EXPERIMENT_TAG, SLOT_TAG = "potluck-experiment", "potluck-slot"
MAX_IDS_PER_CALL = 100
NO_CAPACITY = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "SpotMaxPriceTooLow",
    "Unsupported",
    "UnfulfillableCapacity",
    "VcpuLimitExceeded",
}
THROTTLED = {"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"}
FORGOTTEN = "InvalidInstanceID.NotFound"
STATES: dict[str, Literal["starting", "running", "ending"]] = {
    "pending": "starting",
    "running": "running",
    "stopping": "ending",
    "shutting-down": "ending",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsConfig:
    """Where machines are started, and from what."""

    experiment: str
    region: str
    image: str
    """The AMI: a Linux with Python 3.11 or newer and the AWS command line."""
    instance_profile: str = ""
    """Its role must be allowed to read the experiment's parameters."""
    subnet: str = ""
    max_price: float | None = None
    endpoint_url: str | None = None
    """Another server that speaks EC2's API, for tests."""
    yes: bool = False
    """Let the run's own code run on the machines."""


class AwsProvider:
    """The machines of one experiment in one region."""

    def __init__(self, config: AwsConfig) -> None:
        """Make the clients; nothing is asked of AWS yet."""
        try:
            import boto3
        except ImportError as error:
            raise ConfigurationError("AWS needs boto3: pip install 'potluck-train[spot]'") from error
        self.config = config
        options: dict[str, Any] = {"region_name": config.region, "endpoint_url": config.endpoint_url}
        self._ec2 = boto3.client("ec2", **options)
        self._ssm = boto3.client("ssm", **options)

    @property
    def _path(self) -> str:
        return f"/potluck/{self.config.experiment}"

    def keep_link(self, link: str, requirement: str) -> None:
        """Put the join link, and what pip installs, where the machines find them."""
        with _explained():
            for name, value in (("link", link), ("requirement", requirement)):
                self._ssm.put_parameter(Name=f"{self._path}/{name}", Value=value, Type="SecureString", Overwrite=True)

    def machines(self) -> list[Machine]:
        """List what carries the experiment's tag and is not gone."""
        with _explained():
            return [
                Machine(
                    id=instance["InstanceId"],
                    slot=_tags(instance).get(SLOT_TAG, ""),
                    kind=instance["InstanceType"],
                    state=STATES[instance["State"]["Name"]],
                    started_at=instance["LaunchTime"].timestamp(),
                )
                for page in self._ec2.get_paginator("describe_instances").paginate(Filters=self._filters(*STATES))
                for reservation in page["Reservations"]
                for instance in reservation["Instances"]
            ]

    def start(self, slot: Slot, kind: str) -> Machine:
        """Start one machine: workers on the spot market, aux peers at the full price, since others rely on them."""
        tags = [{"Key": EXPERIMENT_TAG, "Value": self.config.experiment}, {"Key": SLOT_TAG, "Value": slot.name}]
        tagged = ["instance", "volume"]
        request: dict[str, Any] = {
            "ImageId": self.config.image,
            "InstanceType": kind,
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": uuid.uuid4().hex,  # a request that is sent twice starts one machine
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "UserData": user_data(self.config, slot),
        }
        if slot.role == "worker":
            spot: dict[str, Any] = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            if self.config.max_price is not None:
                spot["MaxPrice"] = f"{self.config.max_price:.4f}"
            request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
            tagged.append("spot-instances-request")
        if self.config.instance_profile:
            request["IamInstanceProfile"] = {"Name": self.config.instance_profile}
        if self.config.subnet:
            request["SubnetId"] = self.config.subnet
        request["TagSpecifications"] = [{"ResourceType": what, "Tags": tags} for what in tagged]
        with _explained():
            instance = self._ec2.run_instances(**request)["Instances"][0]
        return Machine(id=instance["InstanceId"], slot=slot.name, kind=kind, state="starting", started_at=time.time())

    def end(self, ids: Sequence[str]) -> None:
        """Terminate machines. AWS refuses a whole call if it has forgotten one of them, so then each has its own."""
        from botocore.exceptions import ClientError

        for first in range(0, len(ids), MAX_IDS_PER_CALL):
            some = list(ids[first : first + MAX_IDS_PER_CALL])
            try:
                with _explained():
                    self._ec2.terminate_instances(InstanceIds=some)
            except ConfigurationError as error:
                cause = error.__cause__
                if not isinstance(cause, ClientError) or cause.response["Error"]["Code"] != FORGOTTEN:
                    raise
                if len(some) > 1:
                    for each in some:
                        self.end([each])

    def prices(self, kinds: Sequence[str]) -> dict[str, float]:
        """Return the spot price of each kind now, in its cheapest zone."""
        found: dict[str, float] = {}
        with _explained():
            answer = self._ec2.describe_spot_price_history(
                InstanceTypes=list(kinds), ProductDescriptions=["Linux/UNIX"], StartTime=datetime.now(UTC)
            )
        for row in answer["SpotPriceHistory"]:
            kind, price = row["InstanceType"], float(row["SpotPrice"])
            found[kind] = min(price, found.get(kind, price))
        return {kind: price for kind, price in found.items() if kind in kinds}

    def remove_everything(self) -> list[str]:
        """End the machines, cancel spot requests, delete the parameters: all that carries the tag or the path."""
        removed = [machine.id for machine in self.machines() if machine.state != "ending"]
        self.end(removed)
        with _explained():
            requests = self._ec2.describe_spot_instance_requests(
                Filters=[
                    {"Name": f"tag:{EXPERIMENT_TAG}", "Values": [self.config.experiment]},
                    {"Name": "state", "Values": ["open", "active"]},
                ]
            )["SpotInstanceRequests"]
            if requests:
                ids = [request["SpotInstanceRequestId"] for request in requests]
                self._ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=ids)
                removed += ids
            names = [f"{self._path}/link", f"{self._path}/requirement"]
            removed += self._ssm.delete_parameters(Names=names)["DeletedParameters"]
        return removed

    def _filters(self, *states: str) -> list[dict[str, Any]]:
        return [
            {"Name": f"tag:{EXPERIMENT_TAG}", "Values": [self.config.experiment]},
            {"Name": "instance-state-name", "Values": list(states)},
        ]


def user_data(config: AwsConfig, slot: Slot) -> str:
    """Return the script that a machine runs when it starts; it has no secret in it, and ends with the machine's end."""
    path = f"/potluck/{config.experiment}"
    role = ["join", *(["--yes"] if config.yes else [])] if slot.role == "worker" else ["aux"]
    bandwidth = ["--bandwidth", f"{slot.bandwidth_mbit:g}Mbit"] if slot.bandwidth_mbit is not None else []
    region = shlex.quote(config.region)
    read = f"aws ssm get-parameter --region {region} --with-decryption --query Parameter.Value --output text"
    potluck = "/opt/potluck/bin/potluck"
    peer = [potluck, *role, '"$link"', "--name", shlex.quote(slot.name), *bandwidth]
    command = " ".join([potluck, "spot", "watch", "--", *peer])
    return f"""#!/bin/bash
trap 'shutdown -h now' EXIT
set -eu
link=$({read} --name {shlex.quote(path + "/link")})
requirement=$({read} --name {shlex.quote(path + "/requirement")})
python3 -m venv /opt/potluck
/opt/potluck/bin/pip install "$requirement"
{command}
"""


def _tags(instance: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}


@contextmanager
def _explained() -> Iterator[None]:
    """Turn boto3's errors into ours, by what can be done about them."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except ClientError as error:
        code, message = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
        if code in NO_CAPACITY:
            raise NoCapacityError(f"AWS has no such machine now ({code}): {message}") from error
        if code in THROTTLED:
            raise ThrottledError(f"AWS wants fewer requests ({code})") from error
        if code.startswith(("Invalid", "Unauthorized", "AuthFailure", "AccessDenied", "OptInRequired")):
            raise ConfigurationError(f"AWS refuses this ({code}): {message}") from error
        raise RetryableError(f"AWS answered with {code}: {message}") from error
    except NoCredentialsError as error:
        raise ConfigurationError("there are no AWS credentials: `aws configure` sets them up") from error
    except BotoCoreError as error:
        raise RetryableError(f"AWS cannot be reached: {error}") from error
