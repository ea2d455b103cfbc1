class RayActorError(Exception): ...

class RayTaskError(Exception):
    cause: Exception
