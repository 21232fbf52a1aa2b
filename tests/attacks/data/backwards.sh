#!/bin/sh
case $* in +%s) ;; *) exec /bin/date "$@" ;; esac
n=$(cat /run/looks 2>/dev/null || echo 0)
echo $((n + 1)) >/run/looks
echo $(($(/bin/date +%s) - 3600 * (n + 1)))
