// A page that is opened as a file may not start a worker: the search then runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.scope.document.createElement("script")
      this.ready = new Promise(resolve => (script.onload = resolve))
      script.src = new URL(url, location).href
      this.scope.document.body.appendChild(script)
    }
    async postMessage(data) {
      await this.ready
      this.scope.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
