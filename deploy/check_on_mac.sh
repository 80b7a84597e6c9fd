#!/bin/sh
# What only a Mac can tell of the service; docs/hardware-checks.md says what is open. At the Mac's own screen, in a
# clone, after `make setup` and `stateroom model add demo`:
#
#     sh deploy/check_on_mac.sh           # some minutes; each line says right or WRONG
#     sh deploy/check_on_mac.sh --sleep   # besides: the Mac goes to sleep; wake it after a minute
#
# It installs the service with the demo model and takes it out again. It stops at once where one is installed.
# Sessions, models and logs stay; it asks for no password, and prints what is to be typed with sudo.
set -u
PATH="$PWD/.venv/bin:$PATH"
LABEL=org.stateroom.daemon
AGENTS="$HOME/Library/LaunchAgents"
SOCKET="${STATEROOM_RUNTIME_DIR:-$HOME/.stateroom/run}/stateroom.sock"
TRIES=60
wrong=0

right() { # WHAT COMMAND...
  what=$1
  shift
  if "$@" >/dev/null 2>&1; then echo "right  $what"; else echo "WRONG  $what  ($*)"; wrong=$((wrong + 1)); fi
}
not() { ! "$@"; }
pid() { stateroom service status --json | python -c 'import json, sys; print(json.load(sys.stdin)["pid"] or "")'; }
another() { now=$(pid); [ -n "$now" ] && [ "$now" != "$1" ]; } # than the process that was
loaded() { launchctl print "gui/$(id -u)/$LABEL"; }
answers() { stateroom generate --max-tokens 4 "The capital of France is"; }
listens() { stateroom service status --json | grep -q '"listening": true'; }
soon() { # COMMAND...: within a minute
  left=$TRIES
  until "$@"; do
    left=$((left - 1))
    [ "$left" -gt 0 ] || return 1
    sleep 1
  done
}
killed() { was=$(pid); kill -9 "$was"; }

[ "$(uname)" = Darwin ] || { echo "This is no Mac."; exit 2; }
[ ! -e "$AGENTS/$LABEL.plist" ] || { echo "The service is installed here: stateroom service uninstall"; exit 2; }
stateroom version
stateroom doctor

echo "--- install"
right "installed" stateroom service install --model demo
right "answers" soon answers
loaded | grep -E 'state =|pid =|last exit|spawn type'
right "no child of a shell: launchd's" sh -c "ps -o ppid= -p $(pid) | grep -qw 1"

echo "--- kill"
killed
right "another process" soon another "$was"
right "answers" soon answers

echo "--- upgrade"
was=$(pid)
right "installed again" stateroom service install --model demo -- --rows-max 8
right "another process" another "$was"
right "with what is new" sh -c "ps -o args= -p $(pid) | grep -q -- '--rows-max 8'"
right "answers" soon answers

echo "--- what can't work"
copy=$(mktemp -d)/copy
cp -R "${STATEROOM_HOME:-$HOME/.stateroom}/models/demo" "$copy"
right "installed" stateroom service install --model "$copy"
rm -r "$copy"
stateroom service restart
sleep 30
right "left with 0, and isn't tried again" sh -c "launchctl print gui/$(id -u)/$LABEL | grep -q 'last exit code = 0'"
stateroom service logs -n 5

echo "--- activation"
right "installed" stateroom service install --activate --model demo
right "launchd listens" listens
right "nothing runs" test -z "$(pid)"
right "the socket is ours alone" sh -c "stat -f %Lp '$SOCKET' | grep -qx 600"
right "the first client starts it" answers
killed
right "and the next one, when it was killed" soon answers
right "stopped" stateroom stop
right "the socket is still there" test -S "$SOCKET"
right "and the next one starts it" soon answers

echo "--- awake while requests run"
stateroom generate --max-tokens 4000 "Count from one to a thousand in words." >/dev/null 2>&1 &
long=$!
right "caffeinate holds an assertion" soon sh -c "pmset -g assertions | grep -q caffeinate"
kill "$long"
right "and lets it go" soon not sh -c "pmset -g assertions | grep -q 'caffeinate.*PreventUserIdle'"
if [ "${1:-}" = --sleep ]; then
  answer=$(mktemp)
  stateroom generate --max-tokens 400 "Tell a long story of a lighthouse." >"$answer" &
  long=$!
  echo "The Mac goes to sleep in 3 s. Wake it after a minute."
  sleep 3
  pmset sleepnow
  sleep 10
  right "what ran goes on after sleep" wait "$long"
  right "with an answer" test -s "$answer"
  right "the daemon answers" soon answers
fi

echo "--- uninstall"
right "taken out" stateroom service uninstall
right "no plist" test ! -e "$AGENTS/$LABEL.plist"
right "no socket" test ! -e "$SOCKET"
right "launchd doesn't know it" not loaded
right "no process" not pgrep -f "stateroom.daemon.cli serve"

echo "--- headless"
boot=$(mktemp)
right "the plist of a LaunchDaemon" sh -c "stateroom service show --boot --model demo >$boot"
right "is one" plutil -lint "$boot"
cat <<EOF
By hand, with sudo; then restart the Mac, don't log in at the screen, and over ssh: stateroom generate hello
  mkdir -p ~/.stateroom/logs
  sudo cp $boot /Library/LaunchDaemons/$LABEL.plist
  sudo chown root:wheel /Library/LaunchDaemons/$LABEL.plist
  sudo chmod 644 /Library/LaunchDaemons/$LABEL.plist
  sudo launchctl bootstrap system /Library/LaunchDaemons/$LABEL.plist
And back:
  sudo launchctl bootout system/$LABEL
  sudo rm /Library/LaunchDaemons/$LABEL.plist
EOF
echo "$wrong wrong"
[ "$wrong" -eq 0 ]
