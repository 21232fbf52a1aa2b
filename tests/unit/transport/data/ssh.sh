#!/bin/sh
case "$*" in
*broken*) echo 'broken line 3: Bad configuration option: y' >&2; exit 255;;
*/dev/null*) printf 'port 22\nuserknownhostsfile ~/.ssh/known_hosts\n';;
*) printf '%s\n' 'port 2222' 'user bob' 'identityfile ~/.ssh/a b' 'identityfile ~/.ssh/c' \
    'userknownhostsfile /a "/b c"';;
esac
