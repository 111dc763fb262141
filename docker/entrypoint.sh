#!/bin/bash
# The first process of a container: docker/entrypoint.sh COMMAND...
#
# Runs the command below it, hands it SIGTERM for each signal that asks for an end, reaps what was
# left without a parent, and ends as the command ended.
set -u

child=
is_told=

pass_on() {
  is_told=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap pass_on TERM INT HUP QUIT

"$@" <&0 &
child=$!
[ -z "$is_told" ] || pass_on # it came before there was anybody to tell

while :; do
  is_told=
  wait "$child"
  status=$?
  [ -n "$is_told" ] || break # no signal cut the wait short: that was the command's own end
  kill -0 "$child" 2>/dev/null && continue
  wait "$child" 2>/dev/null
  known=$?
  [ "$known" = 127 ] || status=$known # 127: the wait before had told it already
  break
done
exit "$status"
