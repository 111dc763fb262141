#!/bin/bash
# The first process of a container: docker/entrypoint.sh COMMAND...
#
# Runs the command as a child, forwards termination signals to it as SIGTERM, reaps orphans, and exits
# with the command's status.
set -u

child=
is_signalled=

forward() {
  is_signalled=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap forward TERM INT HUP QUIT

"$@" <&0 &
child=$!
[ -z "$is_signalled" ] || forward # the signal came before the child was started

while :; do
  is_signalled=
  wait "$child"
  status=$?
  [ -n "$is_signalled" ] || break # no signal interrupted the wait: the command ended
  kill -0 "$child" 2>/dev/null && continue
  wait "$child" 2>/dev/null
  known=$?
  [ "$known" = 127 ] || status=$known # 127: the first wait had the status already
  break
done
exit "$status"
